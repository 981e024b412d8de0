"""The words of the bundled model's world, and how its tokenizer reads them.

One word is one token, so text and token positions can be compared by eye. The tokenizer writes
`<bos>` in front of every encoded text, as Llama's does: `tokenizer(prompt).input_ids` is what the
model expects. Pieces that are joined afterwards (documents, a second turn) are encoded with
`add_special_tokens=False`, and so is the chat template's output, which carries its own `<bos>`.
"""

from itertools import product

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"

_MARKERS = ". : ? ; question answer document rules program walk story done nobody all most both"
_VERBS = "keeps owns inhabits serves follows equals takes adds is likes count"
_FILLERS = (
    "the a old young green grey quiet loud river hill wind rain cloud stone tree bird fox wolf "
    "road bridge field garden night morning summer winter slowly softly often never always runs "
    "sings sleeps waits falls turns and by under over near"
)
_PLACES = (
    "Oslo Lima Paris Rome Delhi Quito Tunis Accra Dakar Hanoi Seoul Minsk Sofia Turin Bergen Malmo "
    "Porto Lyon Ghent Basel Graz Brno Split Varna Izmir Petra Basra Herat Kabul Lhasa Patna Surat "
    "Medan Davao Perth Cusco Leon Tampa Omaha Boise Fargo Provo Nome Sitka Truro Derby Leeds Turku"
)
_OBJECTS = (
    "lamp rope cup bell coin drum flute ring sword shield book map torch boot cloak hat glove "
    "basket jar knife spoon plate chair table mirror clock wheel cart saddle net hook anchor oar "
    "sail flag kite harp fiddle horn whistle brush pen ink scroll candle lantern key lock chest "
    "bag belt scarf pin button thread needle loom axe saw hammer nail plank brick tile"
)
_FIRST = "Al Bo Ce Da El Fa Gi Ha Is Jo Ka Lu Mo No Or Pe"
_LAST = "ma ris na lia ren do vik sa ton mar dra bel gus lyn per zo ka fi ran tus"

FILLERS = tuple(_FILLERS.split())
NAMES = tuple(first + last for first, last in product(_FIRST.split(), _LAST.split()))
PLACES = tuple(_PLACES.split())
OBJECTS = tuple(_OBJECTS.split())
NUMBERS = tuple(str(number) for number in range(100))
STEPS = tuple(f"s{step}" for step in range(320))

_WORDS = (
    *(PAD, BOS, EOS),
    *_MARKERS.split(),
    *_VERBS.split(),
    *(*FILLERS, *NAMES, *PLACES, *OBJECTS, *NUMBERS, *STEPS),
)
VOCABULARY_SIZE = 928
"""The words, padded to a multiple of 32 so that the output matrix has a friendly shape."""

WORD_IDS = {
    word: index
    for index, word in enumerate(
        (*_WORDS, *(f"<unused{n}>" for n in range(VOCABULARY_SIZE - len(_WORDS))))
    )
}

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- ' ' + message.content | trim -}}
{%- if message.role == 'assistant' -%}
{{- ' ' + eos_token -}}
{%- elif message.role == 'user' and not (message.content | trim).endswith('answer :') \
and (add_generation_prompt or not loop.last) -%}
{{- ' answer :' -}}
{%- endif -%}
{%- endfor -%}"""
"""Messages joined by spaces; `answer :` after a user's question unless it already stands there."""
