"""Families of q(omega) compared."""
