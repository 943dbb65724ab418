"""What agents act on: the retrieval service, the shop, the encyclopedia, tools."""
