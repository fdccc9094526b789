"""The task: walk on a board from a start to a goal, in few moves, without seeing where one is.

A prompt has four digits, the columns and rows of start and goal on a board of 10 x 10. The answer
is a sequence of moves. The environment ends it: with reward 1 at the goal, or with reward 0 after
``MOVES`` moves. So wrong answers are long and right answers are short, as they are in reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

SIZE = 10
PROMPT = 4
COORDINATES = SIZE * PROMPT  # each of the four has tokens of its own; the moves follow
STEPS = torch.tensor([[0, 0]] * COORDINATES + [[1, 0], [-1, 0], [0, 1], [0, -1]])  # of any token
VOCABULARY = len(STEPS)
MOVES = 24
LEAST_DISTANCE = 3


def draw_prompts(count: int, generator: torch.Generator, held_out: bool = False) -> Tensor:
    """``[count, 4]``. A fifth of all pairs of start and goal is held out, chosen by a hash."""
    prompts = torch.randint(SIZE, (8 * count + 64, PROMPT), generator=generator)
    start, goal = prompts.split(2, -1)
    far = (start - goal).abs().sum(-1) >= LEAST_DISTANCE
    hashed = (prompts * torch.tensor([7919, 104729, 1299709, 15485863])).sum(-1) % 101
    kept = far & ((hashed < 20) == held_out)
    return prompts[kept][:count]


@dataclass
class Walks:
    """Answers, finished or not, and what training needs to know about them.

    Attributes:
        prompts: ``[B, 4]``.
        moves: ``[B, MOVES]``; what follows the end of a walk means nothing.
        log_probs: of the moves, under the policy that drew each of them.
        mask: True at moves that the environment carried out.
        places: ``[B, 2]``, where the walks are.
        rewards: ``[B]``, 1 at the goal.
        made: number of moves drawn so far, the same for all walks.
    """

    prompts: Tensor
    moves: Tensor
    log_probs: Tensor
    mask: Tensor
    places: Tensor
    rewards: Tensor
    made: int = 0

    @classmethod
    def begin(cls, prompts: Tensor) -> Walks:
        shape = len(prompts), MOVES
        return cls(
            prompts,
            torch.zeros(shape, dtype=torch.long),
            torch.zeros(shape),
            torch.zeros(shape, dtype=torch.bool),
            prompts[:, :2].clone(),
            torch.zeros(len(prompts)),
        )

    def move(self, tokens: Tensor, log_probs: Tensor) -> None:
        """One move of each walk that has not reached its goal; a wall lets nobody through."""
        walking = self.rewards == 0
        self.moves[:, self.made], self.log_probs[:, self.made] = tokens, log_probs
        self.mask[:, self.made] = walking
        places = (self.places + STEPS[tokens]).clamp(0, SIZE - 1)
        self.places = torch.where(walking[:, None], places, self.places)
        self.rewards = (self.places == self.prompts[:, 2:]).all(-1).float()
        self.made += 1

    @property
    def finished(self) -> bool:
        return self.made == MOVES

    def __getitem__(self, rows: Tensor | slice) -> Walks:
        tensors = (getattr(self, field.name) for field in fields(self)[:-1])
        return Walks(*(tensor[rows] for tensor in tensors), self.made)

    @classmethod
    def cat(cls, parts: list[Walks]) -> Walks:
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls)[:-1])
        return cls(*(torch.cat(column) for column in columns), parts[0].made)


def noisy_walks(prompts: Tensor, aim: float, generator: torch.Generator) -> Walks:
    """Walks that make a share ``aim`` of their moves towards the goal and the others at random."""
    walks = Walks.begin(prompts)
    while not walks.finished:
        gap = walks.prompts[:, 2:] - walks.places
        along = torch.rand(len(prompts), generator=generator) * gap.abs().sum(-1)
        axis = (along >= gap[:, 0].abs()).long()  # in proportion to the distance on each axis
        towards = COORDINATES + 2 * axis + (gap.gather(-1, axis[:, None])[:, 0] < 0)
        anywhere = torch.randint(COORDINATES, VOCABULARY, (len(prompts),), generator=generator)
        aimed = torch.rand(len(prompts), generator=generator) < aim
        walks.move(torch.where(aimed, towards, anywhere), torch.zeros(len(prompts)))
    return walks
