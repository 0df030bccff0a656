"""The scikit-learn estimators, scored."""
