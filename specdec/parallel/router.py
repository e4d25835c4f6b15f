"""Which replica gets a request: the one that has the fewest tokens before it."""

from specdec.types import Increment


class Router:
    """Knows what every replica has left to do; equal histories give equal choices.

    The load of a replica is its tokens outstanding: of each sample the tokens that it may still
    get, and its prompt until the first of them came.

    Args:
        num_replicas: how many there are.
    """

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas
        self._replica: dict[str, int] = {}
        # Of each sample that goes on, by its index: prompt tokens to run, tokens to come.
        self._left: dict[str, dict[int, tuple[int, int]]] = {}

    def assign(self, request_id: str, num_prompt: int, num_new: int, num_samples: int = 1) -> int:
        """Choose the least loaded replica for a request, the lowest of equals, and load it.

        Args:
            request_id: not known so far.
            num_prompt: tokens of its prompt.
            num_new: tokens that each sample may get.
            num_samples: how many.
        """
        assert request_id not in self._replica, request_id
        replica = self.loads.index(min(self.loads))
        self._replica[request_id] = replica
        self._left[request_id] = dict.fromkeys(range(num_samples), (num_prompt, num_new))
        self.loads[replica] += (num_prompt + num_new) * num_samples
        return replica

    def advance(self, increment: Increment) -> None:
        """Take in what a sample got."""
        left = self._left[increment.request_id]
        prompt, new = left[increment.sample_index]
        after = 0, max(0, new - len(increment.new_token_ids))
        if not increment.new_token_ids:
            after = prompt, new
        if increment.finish_reason is not None:
            after = 0, 0
        left[increment.sample_index] = after
        self.loads[self._replica[increment.request_id]] -= prompt + new - sum(after)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        left = self._left.pop(request_id)
        self.loads[self._replica.pop(request_id)] -= sum(map(sum, left.values()))
