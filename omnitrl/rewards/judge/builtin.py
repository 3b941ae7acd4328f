# SPDX-License-Identifier: Apache-2.0
"""The judges that have a name: each template with its defaults, at the endpoint of `OPENAI_BASE_URL`."""

from .judge import VLMJudge
from .templates import OCRTemplate, PairwiseTemplate, QuestionsTemplate, ScoreTemplate, YesNoTemplate


judge_ocr = VLMJudge(OCRTemplate())
judge_score = VLMJudge(ScoreTemplate())
judge_yes_no = VLMJudge(YesNoTemplate())
judge_questions = VLMJudge(QuestionsTemplate())
judge_pairwise = VLMJudge(PairwiseTemplate())
