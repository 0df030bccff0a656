"""How MCBN depends on M and T."""
