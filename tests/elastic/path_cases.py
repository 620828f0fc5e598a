"""Paths of supernets as separate networks; together they cover every operator, reduction and norm."""

from subfleet.elastic.families.records.choices import CONVOLUTION_OPERATORS, SEQUENCE_OPERATORS, ChoiceCnn, ChoiceRnn
from subfleet.elastic.network import Family

CNN_PATH = ChoiceCnn(
    input_shape=(1, 8, 8),
    class_count=3,
    widths=(8, 8),
    depths=(3, 3),
    last_widths=(8,),
    operators=tuple((name,) for name in CONVOLUTION_OPERATORS[:6]),
)
POOLED_PATH = ChoiceCnn(
    input_shape=(2, 8, 8),
    class_count=3,
    widths=(4, 8),
    depths=(2, 3),
    last_widths=(4,),
    operators=tuple((name,) for name in CONVOLUTION_OPERATORS[6:]),
    reduction="pool",
    stem_stride=2,
    norm="batch",
)
RNN_PATH = ChoiceRnn(
    input_shape=(5,),
    vocabulary=6,
    class_count=6,
    widths=(4,),
    depths=(len(SEQUENCE_OPERATORS),),
    embedding_width=3,
    operators=tuple((name,) for name in SEQUENCE_OPERATORS),
    norm="none",
)
PATHS: tuple[Family, ...] = (CNN_PATH, POOLED_PATH, RNN_PATH)
