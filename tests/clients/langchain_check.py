"""LangChain's ChatOpenAI against a running stack; `docs/clients.md` says how. Needs langchain-openai, not Baton."""

import os

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    country: str


@tool
def temperature(city: str) -> str:
    """The temperature of a city, in degrees."""
    return f"21 degrees in {city}"


model = ChatOpenAI(
    model="smollm2-135m-instruct",
    base_url=os.environ["BATON_URL"] + "/v1",
    api_key=os.environ["BATON_KEY"],
    temperature=0,
    max_tokens=256,
    seed=7,
    stream_usage=True,
)
question = "What is the capital of France?"
whole = model.invoke(question)
print("invoke:", whole.content, whole.response_metadata["finish_reason"], whole.usage_metadata)

chunks = list(model.stream(question))
streamed = "".join(chunk.content for chunk in chunks)
print("stream:", len(chunks), "chunks, the same text:", streamed == whole.content)

print("batch:", [answer.usage_metadata["output_tokens"] for answer in model.batch([question, "Name a river."])])

scored = model.bind(logprobs=True, top_logprobs=2).invoke(question)
print("logprobs:", len(scored.response_metadata["logprobs"]["content"]), "tokens")

city = model.with_structured_output(City, method="json_schema").invoke("Which city has the Colosseum?")
print("json_schema:", repr(city))

forced = model.bind_tools([temperature], tool_choice="temperature", strict=True)
called = forced.invoke("How warm is it in Rome?")
print("tools:", called.tool_calls[0]["name"], called.tool_calls[0]["args"])

pieces = None
for chunk in forced.stream("How warm is it in Rome?"):
    pieces = chunk if pieces is None else pieces + chunk
print("streamed tools, the same call:", pieces.tool_calls[0]["args"] == called.tool_calls[0]["args"])

call = {"name": "temperature", "args": {"city": "Rome"}, "id": "call-1"}
talk = [
    HumanMessage("How warm is it in Rome?"),
    AIMessage("", tool_calls=[call]),
    ToolMessage("21 degrees", tool_call_id="call-1"),
]
print("tool result:", model.bind_tools([temperature]).invoke(talk).response_metadata["finish_reason"])

try:
    model.bind(extra_body={"suffix": "x"}).invoke(question)
except Exception as error:
    print("refused:", type(error).__name__, str(error)[:160])
