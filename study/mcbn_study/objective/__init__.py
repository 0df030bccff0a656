"""The gradients of Eq. (1) and Eq. (2)."""
