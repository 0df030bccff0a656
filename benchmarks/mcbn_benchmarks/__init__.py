"""Speed, memory, and the networks of others."""
