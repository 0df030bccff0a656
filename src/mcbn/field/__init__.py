"""The posterior in the field: see a shift (`MCBN.watch`), repair it (`MCBN.adapt`), know strange inputs."""
