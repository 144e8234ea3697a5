"""The exam for self_play.toml: the model plays one side of the game, and a player that draws one of the allowed moves the other."""

from __future__ import annotations

import random
import re

import textarena

from headrace.episodes.environments.libraries.games import Game

GAME = "TicTacToe-v0"


def exam(agent, seed):
    """The model plays first if the seed's third bit is 0, else second. Returns 1 for a game that it won, 0.5 for a draw, 0 for one that
    it lost, by moves that are not allowed for instance, or that was cut off."""
    side, chance = seed >> 2 & 1, random.Random(seed)
    game, over = Game(lambda: textarena.make(GAME), seed, players=2), False
    while not over:
        player, said = game.said()
        if player == side:
            reply = agent.chat(said)
            if reply.stop == "limit":
                return {"score": 0.0}
            over = game.over(reply.text)
        else:
            allowed = re.findall(r"'(\[\d\])'", said.rpartition("Available Moves:")[2])
            over = game.over(chance.choice(allowed))
    return {"score": (1 + game.result(side)) / 2}
