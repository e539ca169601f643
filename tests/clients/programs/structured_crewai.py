"""crewAI: a task's `response_model` or `output_pydantic`, and a model's `response_format`; `WAY` is the API and which."""

from crewai_model import model_of
from person import QUESTION, STREAMS, WAY, Person, tell

from crewai import Agent, Crew, Task  # isort: skip

API, _, METHOD = WAY.partition("-")
model = model_of(API, STREAMS)
if METHOD == "model":
    found = model.call(QUESTION, response_model=Person)
    tell(found if isinstance(found, Person) else Person.model_validate_json(found))
else:
    agent = Agent(role="teller", goal="Tell.", backstory="You know people.", llm=model)
    task = Task(description=QUESTION, expected_output="A person.", agent=agent, **{METHOD: Person})
    tell(Crew(agents=[agent], tasks=[task]).kickoff().pydantic)
