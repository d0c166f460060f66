"""Experiments about all methods: how what was fitted to a prompt serves many decoded tokens later."""
