"""The regression study: sections 4.1 to 4.3."""
