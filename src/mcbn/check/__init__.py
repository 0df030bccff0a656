"""Can fitted draws be trusted? `drift` warns while fitting, `diagnosis` examines them on request."""
