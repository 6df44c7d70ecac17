"""What programs do with agent frameworks, in a process of its own: URL of the service, and which one, as the arguments.

An assertion that fails ends it with a traceback.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field

MODEL = "octavo-demo"
ASK = "Name a book."
SUM = "What is 12 * 34?"
EXPRESSION = {"expression": "12 * 34"}


class Book(BaseModel):
    """What an answer must look like."""

    title: str = Field(min_length=1, max_length=12, pattern="^[A-Za-z ]+$")
    kind: Literal["novel", "poem"]
    pages: int = Field(ge=1, le=999)


def calculate(expression: str) -> str:
    """Calculates.

    Args:
        expression: two numbers and a sign between them.
    """
    first, sign, second = expression.split()
    assert sign == "*"
    return str(int(first) * int(second))


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def check_llama_index(url: str) -> None:
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    options: Any = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True}
    for by_call in (True, False):
        model = OpenAILike(
            **options, is_function_calling_model=by_call, should_use_structured_outputs=not by_call, max_tokens=150,
            max_retries=0,
        )  # fmt: skip
        assert isinstance(model.structured_predict(Book, PromptTemplate("Name a {what}."), what="book"), Book)


def check_instructor(url: str) -> None:
    import instructor

    short = [{"role": "user", "content": ASK}]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(url), mode=mode)
        asked: Any = {"model": MODEL, "messages": short, "max_tokens": 150, "max_retries": 0}
        assert isinstance(client.chat.completions.create(**asked, response_model=Book), Book)


def check_pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for wanted in (Book, ToolOutput(Book), NativeOutput(Book)):
            agent: Any = Agent(kind(MODEL, provider=provider), output_type=wanted, retries=0)
            assert isinstance(agent.run_sync(ASK, model_settings={"max_tokens": 150}).output, Book)
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), tools=[calculate])
    assert agent.run_sync(SUM, model_settings={"temperature": 0}).output == "12 * 34 = 408."


def check_smolagents(url: str) -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id=MODEL, api_base=f"{url}/v1", api_key="none", max_tokens=150, temperature=0)
    tools: Any = [tool(calculate)]
    templates = ToolCallingAgent(tools=tools, model=model, verbosity_level=0).prompt_templates
    templates["system_prompt"] = "Be brief."  # its own has more tokens than the bundled model's context
    agent = ToolCallingAgent(
        tools=tools, model=model, max_steps=1, verbosity_level=0, prompt_templates=templates
    )  # fmt: skip
    agent.run(SUM)
    (step,) = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
    assert (step.tool_calls[0].name, step.tool_calls[0].arguments) == ("calculate", EXPRESSION)
    assert step.observations == "408"


def check_outlines(url: str) -> None:
    import outlines
    from outlines.types import Regex

    Book.model_validate_json(outlines.from_openai(openai_client(url), MODEL)(ASK, Book, max_tokens=150))
    model: Any = outlines.from_vllm(openai_client(url), MODEL)
    Book.model_validate_json(model(ASK, Book, max_tokens=150))
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", model(ASK, Regex("[0-9]{4}-[0-9]{2}"), max_tokens=30))
    assert model(ASK, Literal["yes", "no"], max_tokens=30) in ("yes", "no")


if __name__ == "__main__":
    globals()[f"check_{sys.argv[2]}"](sys.argv[1])
