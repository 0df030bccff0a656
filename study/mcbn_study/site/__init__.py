"""Tables and figures of the reproduction, from its records alone: nothing here trains or predicts."""
