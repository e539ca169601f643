// What every client program does: see conversation.py.

export const INSTRUCTIONS = "You add numbers with the add tool.";
export const QUESTIONS = ["What is 2 plus 3?", "And 10 plus 20, and 7 plus 8?"];
export const MODEL = "scripted";
export const STREAMS = process.argv[2] === "stream";
export const DIALECT = process.argv[3];

export const PARAMETERS = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
};

export function answer(given) {
  const { a, b } = typeof given === "string" ? JSON.parse(given) : given;
  return String(a + b);
}

export function tell(view, pieces) {
  console.log(JSON.stringify({ view, pieces: STREAMS ? Math.max(...pieces) : null }));
}
