"""Serving: an HTTP endpoint as OpenAI and Anthropic have it, through which programs are agents."""
