"""A shopping agent: it reads a page, thinks and acts; the reward says how well its purchase fits the instruction."""

from __future__ import annotations

import re
from typing import Any

from rollwright.data.formats import with_system
from rollwright.environments.shop.shop import WebShopPackageSession, parse_shop_action, shop
from rollwright.errors import WorkflowError
from rollwright.experience.experience import Experience
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.task import ResettableWorkflow, Task, with_reward

MAX_STEPS = 15
NO_PURCHASE_REWARD = -0.1

SYSTEM_PROMPT = """You shop online for a customer. Each message shows you the page you are on; the instruction says what the \
customer wants. Reason between <think> and </think>, then give exactly one action between <action> and </action>:
- search[words] looks for products; it works on the search page only.
- click[target] clicks something on the page: a product's id, an option, or a button such as Next >, Description or Buy Now.
Choose the options that the customer asked for before you click[Buy Now]; buying ends the visit."""

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)


@WORKFLOWS.register_module("webshop_workflow")
class WebShopWorkflow(ResettableWorkflow):
    """Lets the model shop; one visit is one experience.

    The reward is ``NO_PURCHASE_REWARD`` if nothing is bought. A task names its session in ``session_id``, or in the
    format's prompt column. ``workflow_args`` may hold:

    * ``shop``: arguments of ``environments.shop.shop``: seed, products, goals, page_size;
    * ``package``: true for the real WebShop if it is installed, or the arguments of its environment;
    * ``max_steps`` (15); ``rich`` (false): mark buttons; ``show_actions`` (true): list what can be clicked;
    * ``system_prompt``: replaces the module's; an empty string omits it.
    """

    def reset(self, task: Task) -> None:
        """Take the next task; the shop itself is shared."""
        self.task = task
        self.arguments = task.arguments(
            max_steps=MAX_STEPS, rich=False, show_actions=True, system_prompt=SYSTEM_PROMPT, shop={}, package=False
        )
        self.session_id = _session_id(task)

    async def run_async(self) -> list[Experience]:
        """Shop until something is bought, or until the steps or the context are used up."""
        session = self._session()
        messages = with_system([{"role": "user", "content": self._page(session)}], self.arguments["system_prompt"])
        reward, steps, misses = NO_PURCHASE_REWARD, 0, 0
        async for reply in self.model.replies(messages, self.arguments["max_steps"]):
            steps += 1
            complaint = "Give one action between <action> and </action>. "
            if (action := parse_action(reply.response_text or "")) is not None:
                result = session.step(action)
                if result.done:
                    reward = result.reward
                    break
                complaint = "" if result.info.get("valid", True) else "This action is not available here. "
            misses += bool(complaint)
            messages.append({"role": "user", "content": complaint + self._page(session)})
        get_tracker("rollout").scalar(shop_steps=steps, shop_bought=session.done, shop_invalid_actions=misses)
        experiences = self.model.extract_experience_from_history()
        return with_reward(experiences, reward, steps=steps, bought=float(session.done), invalid_actions=misses)

    def _session(self) -> Any:
        package, rich = self.arguments["package"], self.arguments["rich"]
        if package:
            return WebShopPackageSession(self.session_id, rich=rich, **({} if package is True else package))
        return shop(**self.arguments["shop"]).session(self.session_id, rich=rich)

    def _page(self, session: Any) -> str:
        if not self.arguments["show_actions"]:
            return session.observation()
        actions = session.get_available_actions()
        targets = ", ".join(target for target in actions["clickables"] if target != "search")
        search = "search[words]" if actions["has_search_bar"] else ""
        click = f"click[one of: {targets}]" if targets else ""
        return f"{session.observation()}\nPossible: {' or '.join(filter(None, [search, click]))}"


def parse_action(text: str) -> str | None:
    """Return the last ``<action>…</action>`` of a reply, or None if it is not a search or a click."""
    found = _ACTION.findall(text)
    return found[-1].strip() if found and parse_shop_action(found[-1]) else None


def _session_id(task: Task) -> int:
    value = task.raw_task.get("session_id", task.task_desc)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise WorkflowError(
            f"task {task.task_id!r} names no shop session: its session_id is {value!r}. Give a number in 'session_id' or in the "
            "format's prompt_key column."
        ) from None
