"""A CIFAR-10 network that others trained."""
