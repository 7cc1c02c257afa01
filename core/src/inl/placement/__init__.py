"""Division of a model among devices: meshes, ranks and shards."""
