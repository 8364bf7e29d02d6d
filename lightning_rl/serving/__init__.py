"""Serving: an HTTP endpoint like OpenAI's and Anthropic's, through which programs act as agents."""
