"""What an author imports to write an agent, its grader and its dataset."""
