"""The library of an invented island, and how it is searched: what stands in it no model can know from anywhere else."""

import re

ENTRIES = {
    "Orrin lighthouse": "Maud Tesk built the Orrin lighthouse in 1871. It is 34 metres tall and burns rapeseed oil.",
    "Velling bridge": "The Velling bridge was opened in 1902. Piet Anslow designed it, and it has seven arches of red granite.",
    "Harrow ferry": "The Harrow ferry is named Petrel. It carries 120 people and sails at dawn from Skerry quay.",
    "Dunmere library": "The Dunmere library holds 8,400 books. Its founder was the whaler Oskar Brandt.",
    "Tolsta market": "The Tolsta market is held on Thursdays. It is known for smoked eel and for blue wool.",
    "Kesh observatory": "The Kesh observatory was founded by Ilse Morrow. Its largest telescope is called Heron.",
    "Brannoch mill": "The Brannoch mill grinds rye. The Calder family has owned it since 1788.",
    "Sandray school": "The Sandray school has 41 pupils. Its head teacher is Nora Fisk, who also teaches chess.",
    "Lake Umber": "Lake Umber is 96 metres deep. The only fish in it is the silver char.",
    "Mount Corrow": "Mount Corrow is 1,133 metres high. Jonas Pell was the first to climb it, in a snowstorm.",
    "Fenwick theatre": "The Fenwick theatre seats 260 people. It opened with a play named The Salt Road.",
    "Gull Rock": "Gull Rock is the home of 9,000 puffins. Its warden is Tamsin Roe.",
    "Ashby clock": "The Ashby clock was made by Leopold Quill. It strikes thirteen at noon.",
    "Merrow hospital": "The Merrow hospital was built in 1934. Its first doctor was Hanna Strand.",
    "Pellow orchard": "The Pellow orchard grows quinces. Its oldest tree was planted by the poet Ewan Laird.",
    "Rusk island": "Rusk island has no inhabitants. Its lagoon is named Glass Water.",
    "Stennis railway": "The Stennis railway is 18 kilometres long. Its only engine is called Martha.",
    "Thornby castle": "Thornby castle was burnt down in 1645. Its last lord was Rafe Dunnock.",
    "Wick museum": "The Wick museum shows 52 ship models. They were carved by the pilot Abel Storm.",
    "Yarrow garden": "The Yarrow garden was laid out by Celia Marsh. It is famous for black tulips.",
}

NOTHING = "Nothing found."


def lookup(query: str) -> str:
    """The entry that has most words in common with the query."""
    wanted = words(query)
    best = max(ENTRIES, key=lambda title: len(wanted & words(f"{title} {ENTRIES[title]}")))
    return f"{best}: {ENTRIES[best]}" if wanted & words(f"{best} {ENTRIES[best]}") else NOTHING


def words(text: str) -> set[str]:
    """The words of a text that say something."""
    return {word for word in re.findall(r"\w+", text.lower()) if len(word) > 3}
