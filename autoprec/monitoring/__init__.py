"""Judging a window of observed steps against the plan that ran."""
