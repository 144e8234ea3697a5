"""instructor: structured answers, asked again where they do not fit."""

import instructor
import openai
from client_side import LONG, PERSON, URL, done, if_served, refused
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


class Person(BaseModel):
    name: str
    age: int


class Elder(BaseModel):
    name: str
    age: int

    def model_post_init(self, context):
        if self.age < 60:
            raise ValueError("not old enough")


def ask(mode, kind=Person, text=PERSON, **more):
    """Returns the fields of the answer."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_retries": 0, **more}
    patched = instructor.from_openai(client, mode=instructor.Mode[mode])
    return patched.chat.completions.create(response_model=kind, **asked).model_dump()


ANN = {"name": "Ann", "age": 30}
assert ask("MD_JSON") == ANN
found = {mode: if_served(lambda mode=mode: ask(mode), ANN) for mode in ("TOOLS", "JSON", "JSON_SCHEMA")}
refused("shorten", lambda: ask("MD_JSON", text=LONG))
refused("there is no model gpt-5", lambda: ask("MD_JSON", model="gpt-5"))
refused("not old enough", lambda: ask("MD_JSON", Elder, max_retries=2))
done(**found)
