"""Lets a model guess a digit, in at most four guesses; knows nothing of training.

Reads its task from standard input, such as `{"prompt": [{"role": "user", "content": "guess"}],
"columns": {"digit": 6}}`, asks the model at OPENAI_BASE_URL, and prints the reward.
"""

import json
import sys

from openai import OpenAI

GUESSES = 4

task = json.load(sys.stdin)
digit = str(task["columns"]["digit"])
messages = task["prompt"]
client = OpenAI()
won = False
for _ in range(GUESSES):
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=2)
    guess = reply.choices[0].message.content or ""
    won = guess == digit
    if won or len(guess) != 1 or not guess.isdigit():
        break
    hint = ">" if digit > guess else "<"
    messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
print(json.dumps({"reward": float(won)}))
