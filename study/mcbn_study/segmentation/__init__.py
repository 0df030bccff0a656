"""Segmentation with uncertainty maps: Teye et al. 2018, Figure 2 (right) and appendix, with numbers they lack."""
