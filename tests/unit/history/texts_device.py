"""A device's memory for texts, and an executor that waits: what tests of texts share."""

from concurrent.futures import Executor, Future

import numpy as np

POISON, REACH, TILE = -7, 4, 8


class Later(Executor):
    """Runs what was submitted when told to."""

    def __init__(self):
        self.tasks = []

    def submit(self, function, /, *args, **kwargs):
        self.tasks.append(lambda: function(*args, **kwargs))
        return Future()

    def run(self):
        while self.tasks:
            self.tasks.pop(0)()


class Memory:
    """A device's memory, which does as it is told: what was never written reads as poison."""

    def __init__(self, texts):
        self.plan = texts
        self.tokens = np.full(texts.most_tokens, POISON, np.int32)
        self.spans = np.zeros((texts.most_problems, texts.past, 3), np.int32)

    def apply(self):
        """Returns the tokens written, or None where there was nothing to do."""
        before, changes = self.tiles(), self.plan.take()
        if changes is None:
            assert self.tiles() == before
            return None
        for begin, tokens in changes.pieces:
            assert tokens.dtype == np.int32 and 0 <= begin < begin + len(tokens) <= len(self.tokens)
            self.tokens[begin : begin + len(tokens)] = tokens
        assert changes.rows.dtype == np.int64 and changes.spans.dtype == np.int32
        assert (np.diff(changes.rows) > 0).all()
        self.spans[changes.rows] = changes.spans
        begins, ends = self.spans[..., 0], self.spans[..., 1]
        assert (begins >= 0).all() and (begins <= ends).all() and (ends <= len(self.tokens)).all()
        for row, (earlier, now) in enumerate(zip(before, self.tiles(), strict=True)):
            assert self.plan.tiles_of(row) >= max(earlier, now)
        return sum(len(tokens) for _, tokens in changes.pieces)

    def want(self, *problems):
        """Until they are read."""
        for problem in problems:
            self.plan.want(problem)
        return self.settle()

    def settle(self):
        """Until there is nothing left to read or to write."""
        executor = self.plan._executor
        while True:
            executor.run()
            if self.apply() is None and not executor.tasks:
                return self

    def tiles(self):
        places = np.maximum(self.spans[..., 1] - self.spans[..., 0] - 1, 0)
        return (-(-places // TILE)).sum(1).tolist()

    def read(self, problem_id):
        """(tokens, eighths) of the problem's texts, in their order; None: it has no row."""
        row = self.plan.row(problem_id)
        if row < 0:
            return None
        return [(tuple(self.tokens[b:e].tolist()), w) for b, e, w in self.spans[row].tolist() if e > b]

    def answers(self, problem_id):
        return [tokens for tokens, _ in self.read(problem_id)]

    def eighths(self, problem_id):
        return [weight for _, weight in self.read(problem_id)]


def whole(answer):
    """An answer behind the last tokens of its prompt."""
    return (*answer.prompt_ids.tolist()[-REACH:], *answer.token_ids.tolist())


def ends(store, texts, answer):
    texts.add(store.append(answer))
