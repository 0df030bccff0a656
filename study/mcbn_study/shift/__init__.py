"""The posterior in the field: shifts seen, strange inputs known, networks repaired; beside what others would use."""
