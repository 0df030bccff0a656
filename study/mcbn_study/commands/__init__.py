"""What the study adds to the `mcbn` command."""
