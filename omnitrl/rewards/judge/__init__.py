# SPDX-License-Identifier: Apache-2.0
"""A vision-language model as judge, behind any OpenAI-compatible endpoint."""

from .answers import Answer, AnswerError
from .judge import VLMJudge
from .messages import Shown
from .templates import (
    CustomTemplate,
    JudgeTemplate,
    OCRTemplate,
    PairwiseTemplate,
    Question,
    QuestionsTemplate,
    ScoreTemplate,
    Verdict,
    YesNoTemplate,
)


__all__ = [
    "Answer",
    "AnswerError",
    "CustomTemplate",
    "JudgeTemplate",
    "OCRTemplate",
    "PairwiseTemplate",
    "Question",
    "QuestionsTemplate",
    "ScoreTemplate",
    "Shown",
    "VLMJudge",
    "Verdict",
    "YesNoTemplate",
]
