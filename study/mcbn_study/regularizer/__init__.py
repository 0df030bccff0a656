"""The KL regulariser beside weight decay."""
