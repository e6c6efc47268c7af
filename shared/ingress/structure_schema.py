"""What a request says of its output's form, as strict types: `response_format`, and an extension for other grammars."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from shared.ingress.tool_schema import Strict, encodable

Text = Annotated[str, Field(min_length=1), AfterValidator(encodable)]


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema with a name. It is enforced whether `strict` is said or not."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_by_name=False)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """Exactly one of: a JSON schema, a regular expression, a list of texts, a grammar in Lark as llguidance has it."""

    schema_: dict[str, Any] | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text] | None, Field(min_length=1)] = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.schema_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("must hold exactly one of json, regex, choice, grammar")
        return self
