"""What sees every operator of a forward."""

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Torch hides a mode's own code from its compiler, and imports that for it: two seconds, in processes of which few
    compile anything. No compiled model runs under a mode here, so there is nothing to hide."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
