"""Two small languages: sentences drawn from word lists, so that corpora of any size are repeatable
and the second is spelled unlike the first."""

from __future__ import annotations

import random
from pathlib import Path

ENGLISH = """the of and to in that was his he it with is for as had you not be her on at by which
have or from this him but all she they were my are me one their so an said them we who would been
will no when there if more out up into do any your what has man could other than our some very time
upon about may its only now little then can made should did us such great before must these two see
know over much down after first good men own never most old shall day where those came come himself
way work life without go make well through being long say might how am too even here every light
ought enough night thought weather whether station nation question"""
FRENCH = """le la les des une dans que qui est était pour pas avec sur plus son elle mais ils nous
vous tout comme bien être avoir fait même aussi où très leur sans après deux encore alors toujours
jamais rien quelque chose temps homme femme jour nuit maison monde vie année pendant français
première beaucoup déjà peut-être aujourd'hui œuvre forêt château garçon naïve à côté été élève
lumière eau beau nouveau heureux jeune yeux vieux travail soleil oiseau feuille fauteuil ville
fille famille bonjour voilà voyage question nation station"""


def sentences(words: str, count: int, seed: int) -> list[str]:
    draw, choice = random.Random(seed), words.split()
    return [f"{' '.join(draw.choices(choice, k=12)).capitalize()}.\n" for _ in range(count)]


def write_corpus(folder: Path, words: str, *, documents: int = 20, seed: int = 0) -> Path:
    folder.mkdir(parents=True)
    for number in range(documents):
        text = "".join(sentences(words, 30, seed * 1000 + number))
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder
