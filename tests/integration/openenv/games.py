"""Environments for OpenEnv, as an author writes them; written where its Python finds them."""

from pathlib import Path

GUESS = '''
"""A digit to guess in several turns; `trap` says what goes wrong at the second."""
import os
import random
import signal
import time
from pathlib import Path

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    guess: int


class GuessObservation(Observation):
    told: str
    cost: float = 0.0


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, trap="", marks="", **arguments):
        if trap == "no reset":
            raise RuntimeError("no board")
        if trap == "no text":
            return GuessObservation(told=None)
        self.number, self.tries = random.Random(seed).randrange(10), 0
        if trap == "drifts":
            self.number = time.time_ns()
        self.trap, self.marks = trap, marks
        told = f"0 to 9? {self.number}" if trap == "drifts" else "0 to 9?"
        return GuessObservation(told=told, done=trap == "over")

    def spring(self):
        """Do what goes wrong: once if there is a file to remember it by."""
        if self.marks:
            with open(self.marks, "a") as file:
                file.write("x")
            if Path(self.marks).read_text() != "x":
                return
        if self.trap == "dies":
            print("struck down", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trap == "raises":
            raise RuntimeError("the board is gone")
        if self.trap == "hangs":
            time.sleep(3600)

    def step(self, action: GuessAction, timeout_s=None, **arguments) -> GuessObservation:
        self.tries += 1
        if self.tries == 2:
            self.spring()
        hit = action.guess == self.number
        told = "Yes." if hit else "Larger." if self.number > action.guess else "Smaller."
        # Metadata may differ when an episode is repeated.
        more = {"tries": self.tries, "at": time.time_ns()}
        return GuessObservation(
            told=told, cost=-0.25, done=hit, reward=hit - 0.25, metadata=more
        )

    @property
    def state(self):
        return State(step_count=self.tries)


class Alone(Guess):
    SUPPORTS_CONCURRENT_SESSIONS = False


served = create_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=2)


class Rude:
    """Answers the first session of a server's life with status 500."""

    asked = 0

    async def __call__(self, scope, receive, send):
        if scope["type"] == "websocket":
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("not yet")
        await served(scope, receive, send)


rude = Rude()
'''

SHOP = '''
"""Tools: prices to look up, and an order, which ends the episode and pays."""
from fastmcp import FastMCP
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Observation, State

PRICES = {"apple": 3, "pear": 4}


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("shop")

        @mcp.tool
        def price(fruit: str) -> int:
            """What some fruit costs."""
            self.looked += 1
            return PRICES[fruit] + self.coins

        @mcp.tool
        def order(fruit: str) -> str:
            """Buy some fruit."""
            return f"Bought after {self.looked}."

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **arguments):
        self.coins, self.looked = seed or 0, 0
        return Observation()

    async def step_async(self, action, timeout_s=None, **arguments):
        seen = await super().step_async(action, timeout_s, **arguments)
        if isinstance(action, CallToolAction):
            ordered = action.tool_name == "order"
            seen.reward, seen.done = (1.0, True) if ordered else (-0.125, False)
        return seen

    def _step_impl(self, action, timeout_s=None, **arguments):
        raise ValueError("only tools")

    @property
    def state(self):
        return State()


class Bare(Shop):
    """A shop that has no tools."""

    def __init__(self):
        MCPEnvironment.__init__(self, FastMCP("bare"))
'''

JUNK = '''
"""No server of OpenEnv: what it sends is no observation."""
from fastapi import FastAPI, WebSocket

app = FastAPI()
SENT = {"a": "[", "b": "{}", "c": '{"type": "observation", "data": {"observation": 3}}',
        "d": '{"type": "observation", "data": {"observation": {}, "reward": "much"}}',
        "e": '{"type": "observation", "data": {"observation": {}, "reward": NaN}}',
        "f": '{"type": "observation", "data": {"observation": {}, "done": 1}}'}


@app.get("/health")
def health():
    return {}


@app.get("/schema")
def schema():
    return {"action": {"title": "Act", "properties": {"text": {}, "metadata": {}}}}


@app.websocket("/ws")
async def session(websocket: WebSocket):
    await websocket.accept()
    while True:
        asked = await websocket.receive_json()
        if asked["type"] == "close":
            return await websocket.close()
        await websocket.send_text(SENT[asked["data"]["kind"]])
'''


def write_games(place: Path) -> Path:
    """Write modules that a server imports with PYTHONPATH at this place."""
    for name, text in {"oe_guess": GUESS, "oe_shop": SHOP, "oe_junk": JUNK}.items():
        (place / f"{name}.py").write_text(text)
    return place
