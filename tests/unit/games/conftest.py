"""Lend tests of games a server that speaks OpenAI's API."""

import pytest

from tests.support.openai_server import OpenAIServer
from tests.support.serving import serving


@pytest.fixture
def server():
    with serving(OpenAIServer()) as server:
        yield server
