"""The main job: questions to a document whose KV cache does not fit the memory that it is given."""
