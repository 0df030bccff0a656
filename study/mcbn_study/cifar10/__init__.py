"""CIFAR-10 with the paper's ResNet-32: Teye et al. 2018, section 4.4 and Table 2."""
