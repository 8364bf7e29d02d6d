"""Another library's configuration as ours."""
