"""What a user could pick instead of MCBN, on the same trained networks and images."""
