"""INL with Mooncake Store: the store ``mooncake`` of blocks that engines share."""
