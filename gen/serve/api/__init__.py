"""Endpoints with the shapes of OpenAI's API."""
