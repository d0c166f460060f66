"""Experiments of IceCache: accuracy, the DCI-tree alone, and times."""
