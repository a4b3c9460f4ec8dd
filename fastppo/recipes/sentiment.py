"""`smollm2-sentiment`: the beginnings of everyday sentences, continued so that they sound glad."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from fastppo.data.rows import write_rows
from fastppo.recipes import smollm2

PROMPTS = """\
The weather this morning was
My neighbour knocked on the door and
When I opened the letter, I
The bus to work was
Our dinner last night was
I looked out of the window and saw
The new teacher at the school is
After the meeting my boss said that
The train arrived and everybody
My sister called me because
The film that we watched yesterday was
At the market this week they had
The doctor told me that
I tried the new recipe, and it
The garden behind our house is
My phone rang in the middle of
The children next door are
On the way home I found
The soup at that restaurant tastes
Last weekend we went to
The old bridge near the station
I have been thinking about my job, and
The dog ran up to me and
Our holiday this year was
The book on my desk is
When the music started, people
The shop on the corner has
My first day at university was
I asked the waiter for help, and he
The flat that we looked at was
It rained all day, so we
The coffee in the office is
My grandmother always used to say that
The game ended and the players
I finally finished the project, and
The car broke down, and then
Somebody left a note that said
The concert in the park was
My friend moved to another city and
The hotel room that we booked was
In the evening the streets are
The customer service told me that
I wore my new coat and
The cake that I baked was
The neighbours are building a
Our team meeting went
The museum in our town is
When I woke up today, I
The cat jumped on the table and
I sent my application, and they
The beach was full of people who
My brother's wedding was
The news this morning was about
I joined the running club, and
The repair of my bicycle was
We waited in the queue, and
The wind blew through the trees and
My language course is
The delivery came on time, and
I talked to a stranger who
The library has a new room where
Our new kitchen is
The exam was over, and I
The party at my colleague's house was
I planted tomatoes, and they
The bakery at the corner sells
The journey took six hours, and
My old computer is
The photograph on the wall shows
We moved into the new office, and
The river behind the town is
I tried to fix the lamp, and
The haircut that I got is
My son came home from school and
The picnic by the lake was
The manager looked at my plan and
I sat down on the bench and
The hike up the mountain was
The first snow of the year
My parents visited us, and
The radio played a song that
I bought a used guitar, and it
The dentist said that my teeth
The playground is full of
Our flight was called, and
The tea that she made was
I counted my savings, and
The street festival this summer was
My shoes are
The end of the story is
""".splitlines()

HELD_OUT = """\
The breakfast at the inn was
My uncle wrote to tell me that
When the lights went on, we
The lecture this afternoon was
I met an old friend, and she
The boat trip was
The painter finished our hall, and it
My new glasses are
The village where I grew up is
We opened the box and found
The interview this morning went
Our balcony in the summer is
The nurse at the front desk
I listened to the whole speech, and
The bread from the market is
My commute has become
The birthday card from my aunt said
When the rain stopped, the children
The choir sang, and the audience
The sofa that we ordered is
I took a long walk, and
The landlord answered that
The match on television was
My evening class is
""".splitlines()


def prepare(directory: Path, seed: int, console: Console) -> None:
    """Writes model/, prompts.jsonl and held_out.jsonl."""
    smollm2.unpack(directory / "model")
    write_rows(directory / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    write_rows(directory / "held_out.jsonl", [{"prompt": text} for text in HELD_OUT])
