"""The real WebShop, for users who have installed it: the same session interface over its text environment.

Nothing of WebShop comes with Rollwright. It needs Python 3.8 to 3.10, Java and its data, and is licensed for academic use only;
install it from https://github.com/princeton-nlp/WebShop into the environment that runs the workflow.
"""

from __future__ import annotations

from typing import Any

from rollwright.environments.shop.session import StepResult
from rollwright.errors import ConfigError


class WebShopPackageSession:
    """One session of ``web_agent_site.envs.WebAgentTextEnv``.

    Args:
        session_id: the goal, as the environment's ``reset(session=...)`` takes it.
        rich: observations mark buttons (``text_rich``).
        environment: an environment to use; None: one is made with ``options``.
        options: arguments of ``WebAgentTextEnv``, such as ``num_products``.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, session_id: int, *, rich: bool = False, environment: Any = None, **options: Any) -> None:
        if environment is None:
            try:
                from web_agent_site.envs import WebAgentTextEnv
            except ImportError as error:
                raise ConfigError(
                    f"the WebShop package cannot be imported ({error}); install it, or leave out `package: true` to use the "
                    "shop that comes with Rollwright."
                ) from error
            environment = WebAgentTextEnv(observation_mode="text_rich" if rich else "text", **options)
        self.environment = environment
        self.environment.reset(session=session_id)
        self.done = False

    def observation(self) -> str:
        """The page as text."""
        return self.environment.observation

    def get_available_actions(self) -> dict[str, Any]:
        """``{"has_search_bar", "clickables"}``."""
        return self.environment.get_available_actions()

    def step(self, action: str) -> StepResult:
        """Do an action; its reward is the environment's."""
        observation, reward, self.done, info = self.environment.step(action)
        return StepResult(observation, float(reward), bool(self.done), info or {})
