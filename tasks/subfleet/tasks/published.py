"""The data sets that are downloaded; they are registered as entry points."""

from collections.abc import Mapping

from subfleet.tasks import known_classes
from subfleet.tasks.named_dataset import NamedDataset
from subfleet.tasks.readers.images import read_cifar10, read_cifar100, read_image_arrays, read_mnist
from subfleet.tasks.readers.leaf import read_femnist, read_leaf_text
from subfleet.tasks.readers.speech import CLIP_SAMPLES, KEYWORDS, MEL, WORDS, read_speech_commands, read_speech_subset
from subfleet.tasks.readers.texts import (
    CHARACTER_CONTEXT,
    VOCABULARY,
    WORD_CONTEXT,
    read_characters,
    read_roles,
    read_wikitext_words,
)
from subfleet.tasks.source_files import SourceFile
from subfleet.tasks.transforms.tokens import CHARACTERS


def _list_gzips(folder: str, url: str, files: Mapping[str, tuple[int, str]]) -> tuple[SourceFile, ...]:
    """The four files of the MNIST family; sizes and SHA-256 by name."""
    return tuple(
        SourceFile(paths=(f"{folder}/{name}",), url=f"{url}{name}", limit_bytes=size_bytes, checksum=f"sha256:{digits}")
        for name, (size_bytes, digits) in files.items()
    )


_TRAIN_IMAGES, _TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
_TEST_IMAGES, _TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
_MNIST_FILES = _list_gzips(
    "mnist",
    # The authors' address no longer serves the files; this is torchvision's mirror.
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        _TRAIN_IMAGES: (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        _TRAIN_LABELS: (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        _TEST_IMAGES: (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        _TEST_LABELS: (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    },
)
_FASHION_FILES = _list_gzips(
    "fashion_mnist",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    {
        _TRAIN_IMAGES: (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        _TRAIN_LABELS: (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        _TEST_IMAGES: (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        _TEST_LABELS: (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
)
_CIFAR10_FILE = SourceFile(
    paths=("cifar10/cifar-10-binary.tar.gz",),
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    limit_bytes=170_052_171,
    checksum="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
_CIFAR100_FILE = SourceFile(
    paths=("cifar100/cifar-100-binary.tar.gz",),
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    limit_bytes=168_513_733,
    checksum="sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
)
_CIFAR10_SUBSET_FILE = SourceFile(
    paths=("cifar10/cifar10_lossless_12k.npz",),
    checksum="sha256:5665ada64931912bc214167975216664ca53aac198683558666acf00be4c05c9",
)
_ROLES_FILE = SourceFile(
    paths=("shakespeare_roles/roles.jsonl.gz",),
    checksum="sha256:8ad89b93dc63039e2d17dbdf637e3d28046d9104f40bc7f8fae0a0bb228384c2",
)
_TINY_SHAKESPEARE_FILE = SourceFile(
    paths=("tinyshakespeare/input.txt",),
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    limit_bytes=1_115_394,
    checksum="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
_WIKITEXT_FILE = SourceFile(
    paths=("wikitext2/wikitext-2-v1.zip",),
    # The authors' first address, s3.amazonaws.com/research.metamind.io, no longer serves it; this is one author's own.
    url="https://wikitext.smerity.com/wikitext-2-v1.zip",
    limit_bytes=5_000_000,
    checksum="sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
)
_SPEECH_FILE = SourceFile(
    paths=("speech_commands/speech_commands_v0.02.tar.gz",),
    url="https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
    limit_bytes=2_428_923_189,
    checksum="sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58",
)
_SPEECH_SUBSET_FILE = SourceFile(
    paths=("speech_commands/sc_v002_test_subset.npz",),
    checksum="sha256:040dadfb4a4dc9d293db5820ccecf9fa775c08a61faedfd69fe223698db490fb",
)
_GRAY, _COLOUR = (1, 28, 28), (3, 32, 32)
_SOUND = (1, MEL.frames(CLIP_SAMPLES), MEL.bands)
_CIFAR_LICENCE = "none stated; cite Krizhevsky 2009"
_SPEECH_LICENCE = "CC BY 4.0"
_WIKITEXT_LICENCE = "CC BY-SA 3.0"
_WIKITEXT_SOURCE = "Merity et al. 2016, articles of the English Wikipedia; the address is Stephen Merity's own."

MNIST = NamedDataset(
    name="mnist",
    summary="handwritten digits in 10 classes",
    files=_MNIST_FILES,
    read=read_mnist,
    input_shape=_GRAY,
    class_count=10,
    class_names=known_classes.DIGITS,
    objective="cross_entropy",
    licence="CC BY-SA 3.0",
    source="LeCun et al. 1998, made of NIST's special databases 1 and 3.",
)
FASHION_MNIST = NamedDataset(
    name="fashion_mnist",
    summary="articles of clothing in 10 classes",
    files=_FASHION_FILES,
    read=read_mnist,
    input_shape=_GRAY,
    class_count=10,
    class_names=known_classes.CLOTHES,
    objective="cross_entropy",
    licence="MIT",
    source="Xiao et al. 2017, photographs of Zalando's catalogue.",
)
CIFAR10 = NamedDataset(
    name="cifar10",
    summary="photographs in 10 classes",
    files=(_CIFAR10_FILE,),
    read=read_cifar10,
    input_shape=_COLOUR,
    class_count=10,
    class_names=known_classes.CIFAR10,
    objective="cross_entropy",
    licence=_CIFAR_LICENCE,
    source="Krizhevsky 2009, a labelled part of the Tiny Images.",
)
CIFAR10_SUBSET = NamedDataset(
    name="cifar10_subset",
    summary="photographs in 10 classes, 1,000 of each for training and 200 for the test",
    files=(_CIFAR10_SUBSET_FILE,),
    read=read_image_arrays,
    input_shape=_COLOUR,
    class_count=10,
    class_names=known_classes.CIFAR10,
    objective="cross_entropy",
    licence=_CIFAR_LICENCE,
    source="12,000 images of CIFAR-10, unchanged, in one .npz file.",
    stand_in_for="cifar10",
)
CIFAR100 = NamedDataset(
    name="cifar100",
    summary="photographs in 100 classes",
    files=(_CIFAR100_FILE,),
    read=read_cifar100,
    input_shape=_COLOUR,
    class_count=100,
    class_names=known_classes.CIFAR100,
    objective="cross_entropy",
    licence=_CIFAR_LICENCE,
    source="Krizhevsky 2009, a labelled part of the Tiny Images.",
)
FEMNIST = NamedDataset(
    name="femnist",
    summary="handwritten digits and letters in 62 classes, by writer",
    files=(SourceFile(paths=("femnist/leaf.zip", "femnist/leaf")),),
    read=read_femnist,
    input_shape=_GRAY,
    class_count=62,
    class_names=known_classes.LETTERS_AND_DIGITS,
    objective="cross_entropy",
    owner="writer",
    licence="public domain (NIST); LEAF's programs BSD-2-Clause",
    source="Caldas et al. 2018 (LEAF), made of NIST's special database 19 by LEAF's own programs.",
)
SHAKESPEARE = NamedDataset(
    name="shakespeare",
    summary="the next character of plays, by role",
    files=(_ROLES_FILE,),
    read=read_roles,
    input_shape=(CHARACTER_CONTEXT,),
    class_count=CHARACTERS,
    objective="next_token",
    owner="role",
    licence="public domain",
    source="The plays of Shakespeare, speeches by role.",
)
SHAKESPEARE_LEAF = NamedDataset(
    name="shakespeare_leaf",
    summary="the next character of plays, by role, as LEAF cuts them",
    files=(SourceFile(paths=("shakespeare/leaf.zip", "shakespeare/leaf")),),
    read=read_leaf_text,
    input_shape=(CHARACTER_CONTEXT,),
    class_count=CHARACTERS,
    objective="next_token",
    owner="role",
    licence="public domain; LEAF's programs BSD-2-Clause",
    source="Caldas et al. 2018 (LEAF), made of Project Gutenberg's Shakespeare by LEAF's own programs.",
)
TINYSHAKESPEARE = NamedDataset(
    name="tinyshakespeare",
    summary="the next character of one text",
    files=(_TINY_SHAKESPEARE_FILE,),
    read=read_characters,
    input_shape=(CHARACTER_CONTEXT,),
    class_count=CHARACTERS,
    objective="next_token",
    licence="public domain; the selection MIT",
    source="Karpathy's char-rnn, 40,000 lines of Shakespeare.",
)
WIKITEXT2 = NamedDataset(
    name="wikitext2",
    summary="the next word of articles",
    files=(_WIKITEXT_FILE,),
    read=read_wikitext_words,
    input_shape=(WORD_CONTEXT,),
    class_count=VOCABULARY,
    objective="next_token",
    licence=_WIKITEXT_LICENCE,
    source=_WIKITEXT_SOURCE,
)
WIKITEXT2_CHARACTERS = NamedDataset(
    name="wikitext2_characters",
    summary="the next character of articles",
    files=(_WIKITEXT_FILE,),
    read=read_characters,
    input_shape=(CHARACTER_CONTEXT,),
    class_count=CHARACTERS,
    objective="next_token",
    licence=_WIKITEXT_LICENCE,
    source=_WIKITEXT_SOURCE,
)
SPEECH_COMMANDS = NamedDataset(
    name="speech_commands",
    summary="35 spoken words as log-mel bands, by speaker",
    files=(_SPEECH_FILE,),
    read=read_speech_commands,
    input_shape=_SOUND,
    class_count=len(WORDS),
    class_names=WORDS,
    objective="cross_entropy",
    owner="speaker",
    licence=_SPEECH_LICENCE,
    source="Warden 2018, version 0.02.",
)
SPEECH_COMMANDS_SUBSET = NamedDataset(
    name="speech_commands_subset",
    summary="10 spoken words, other words and silence as log-mel bands, by speaker",
    files=(_SPEECH_SUBSET_FILE,),
    read=read_speech_subset,
    input_shape=_SOUND,
    class_count=len(KEYWORDS),
    class_names=KEYWORDS,
    objective="cross_entropy",
    owner="speaker",
    licence=_SPEECH_LICENCE,
    source="1,560 clips of the test archive of Warden 2018, version 0.02, in one .npz file.",
    stand_in_for="speech_commands",
)
