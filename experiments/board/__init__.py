"""Comparisons of all methods: leaderboard, evaluation, long generation, and their reports."""
