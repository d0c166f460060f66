"""Parts that several methods share."""
