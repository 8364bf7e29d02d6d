"""Tools of MCP servers, which run as programs beside the test: they answer, fail, hang and die."""

import pickle
import subprocess
import sys
import time

import pytest

from lightning_rl.agents.mcp import MCPTools
from lightning_rl.agents.tools import Toolbox
from lightning_rl.engines.replicas.server_process import free_port
from lightning_rl.errors import ConfigError, EpisodeError
from lightning_rl.rollout import Picture
from lightning_rl.run.loop.background import run_async
from tests.support.agents import tool_calls

SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int = 0, name: str = "") -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def refuse(reason: str) -> str:
    """Refuse."""
    from mcp.server.mcpserver.exceptions import ToolError
    raise ToolError(reason)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def draw() -> Image:
    """Draw a black square."""
    from io import BytesIO
    from PIL import Image as PIL
    data = BytesIO()
    PIL.new("RGB", (8, 8)).save(data, "PNG")
    return Image(data=data.getvalue(), format="png")


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return str(path)


@pytest.fixture
def toolbox_of():
    """Make toolboxes that are closed at the end."""
    made = []

    def make(*tools, timeout=20.0):
        made.append(Toolbox(tools, timeout))
        return made[-1]

    yield make
    for toolbox in made:
        toolbox.close()


def answers(toolbox, *asked):
    """Return replies to calls given as (name, arguments); a server may get several."""
    return run_async(toolbox.answer(tool_calls(asked)))


def contents(replies):
    return [reply["content"] for reply in replies]


def twice(a: int) -> int:
    """Double a number.

    Args:
        a: the number.
    """
    return 2 * a


def test_a_server_started_here_offers_its_tools_beside_functions(script, toolbox_of):
    server = MCPTools([sys.executable, script], names=["wait", "add"])
    toolbox = toolbox_of(server, twice)
    schemas = {schema["function"]["name"]: schema for schema in toolbox.schemas}
    assert [*schemas] == ["twice", "wait", "add"]
    assert schemas["add"]["function"]["description"] == "Add two numbers."
    assert schemas["add"]["function"]["parameters"]["required"] == ["a"]
    # An argument may have any name, and calls of one turn run at the same time.
    asked = [
        ("wait", {"seconds": 0.2}),
        ("add", {"a": 3, "b": 4, "name": "x"}),
        ("twice", {"a": 5}),
    ]
    assert contents(answers(toolbox, *asked)) == ["waited", "7", "10"]


def test_errors_of_a_tool_are_the_models(script, toolbox_of):
    toolbox = toolbox_of(MCPTools([sys.executable, script]), timeout=1.0)
    assert toolbox.schemas
    refused, wrong, slow, right = answers(
        toolbox,
        ("refuse", {"reason": "not today"}),
        ("add", {"a": "many"}),
        ("wait", {"seconds": 60}),
        ("add", {"a": 1}),
    )
    assert (refused["error"], wrong["error"], slow["error"]) == (
        "exception",
        "exception",
        "timeout",
    )
    assert "not today" in refused["content"]
    assert "valid integer" in wrong["content"]
    assert slow["content"] == "Error: wait took longer than 1 s"
    assert right["content"] == "1"


def test_a_picture_is_shown(script, toolbox_of):
    toolbox = toolbox_of(MCPTools([sys.executable, script], names=["draw"]))
    assert toolbox.schemas
    [[part]] = contents(answers(toolbox, ("draw", {})))
    assert isinstance(part["image"], Picture)


def test_a_lost_server_fails_the_rollout_and_is_started_again(script, toolbox_of):
    server = MCPTools([sys.executable, script])
    toolbox = toolbox_of(server)
    assert toolbox.schemas
    with pytest.raises(EpisodeError, match=r"server\.py'\) was lost during a call of 'leave'"):
        answers(toolbox, ("leave", {}))
    assert contents(answers(toolbox, ("add", {"a": 2, "b": 2}))) == ["4"]
    copied = toolbox_of(pickle.loads(pickle.dumps(server)))  # as another process gets it
    assert copied.schemas == toolbox.schemas
    assert contents(answers(copied, ("add", {"a": 3}))) == ["3"]


def test_a_server_over_http(script, toolbox_of):
    port = free_port()
    with subprocess.Popen(
        [sys.executable, script, str(port)], stderr=subprocess.DEVNULL
    ) as process:
        try:
            server = MCPTools(
                url=f"http://127.0.0.1:{port}/mcp", names=["add"], headers={"X-Test": "1"}
            )
            deadline = time.monotonic() + 60
            while True:
                try:
                    toolbox = toolbox_of(server)
                    assert toolbox.schemas
                    break
                except ConfigError:
                    assert time.monotonic() < deadline
            assert contents(answers(toolbox, ("add", {"a": 20, "b": 1}))) == ["21"]
            toolbox.close()
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": ["/nowhere/x"]}, r"MCPTools\('/nowhere/x'\) cannot be used: FileNotFound"),
        (
            {"command": [sys.executable, "-c", "raise SystemExit('no key')"]},
            "cannot be used: .*; it wrote: no key",
        ),
        (
            {"command": [sys.executable, "-c", "input(); input()"], "start_timeout": 0.5},
            "cannot be used: no answer within start_timeout=0.5 s",
        ),
    ],
)
def test_a_server_that_does_not_start_says_why(options, words, toolbox_of):
    with pytest.raises(ConfigError, match=words):
        _ = toolbox_of(MCPTools(**options)).schemas


def test_what_cannot_work_is_said(script, toolbox_of):
    with pytest.raises(ConfigError, match=r"MCPTools\(command=None, url=None\) needs exactly one"):
        MCPTools()
    with pytest.raises(ConfigError, match=r"start_timeout=0\) must be > 0 seconds"):
        MCPTools(url="http://x", start_timeout=0)
    with pytest.raises(ConfigError, match=r"has no tool 'sub'; it has add, refuse"):
        _ = toolbox_of(MCPTools([sys.executable, script], names=["sub"])).schemas
    with pytest.raises(ConfigError, match="two tools share the name 'add'"):
        _ = toolbox_of(*[MCPTools([sys.executable, script], names=["add"])] * 2).schemas


PAGES = """
import asyncio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import ListToolsResult, Tool


async def listed(context, params):
    page = int((params and params.cursor) or 0)
    tools = [Tool(name=f"tool_{page}_{i}", input_schema={"type": "object"}) for i in range(2)]
    following = "1" if ENDLESS else str(page + 1) if page < 2 else None
    return ListToolsResult(tools=tools, next_cursor=following)


async def main():
    server = Server("pages", on_list_tools=listed)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
"""


def test_tools_are_read_page_by_page(tmp_path, toolbox_of):
    script = tmp_path / "pages.py"
    script.write_text(f"ENDLESS = False\n{PAGES}")
    toolbox = toolbox_of(MCPTools([sys.executable, str(script)]))
    names = [schema["function"]["name"] for schema in toolbox.schemas]
    assert names == [f"tool_{page}_{i}" for page in range(3) for i in range(2)]
    script.write_text(f"ENDLESS = True\n{PAGES}")
    endless = toolbox_of(MCPTools([sys.executable, str(script)]))
    with pytest.raises(ConfigError, match="lists its tools without end: page '1' again"):
        endless.schemas  # noqa: B018
