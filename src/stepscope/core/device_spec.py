"""The datasheet figures of known devices."""

import difflib
import re
from collections.abc import Iterator

import msgspec

from stepscope.core.environment import Environment
from stepscope.core.errors import InputError
from stepscope.core.precisions import PRECISIONS, Dtype
from stepscope.core.units import GIB, MIB


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Datasheet figures of one device: dense rates (no sparsity), FLOP/s by matrix-product dtype."""

    name: str
    memory_bytes: int | None = None
    """What PyTorch states as the device's memory, which is less than its label."""
    peak_flops_per_s: dict[str, float]
    peak_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    """What the links to the other devices of its host carry in one direction, all together."""
    source: str

    def peak_for(self, dtype: Dtype) -> float | None:
        """Peak FLOP/s of the matrix products that run under `dtype`."""
        return self.peak_flops_per_s.get(PRECISIONS[dtype].multiplies)


_DATASHEETS = """
[NVIDIA | 5 | -]
GB300:                              268G  8000   2500  1250    80   5000   900  NVIDIA GB300 NVL72 datasheet
B300 SXM6 AC:                       268G  8000   2250  1100    75   4500   900  NVIDIA HGX B300 datasheet
GB200:                            189471  8000   2500  1250    80   5000   900  NVIDIA Blackwell datasheet (GB200 NVL72)
B200:                             183359  7700   2250  1100    75   4500   900  NVIDIA Blackwell datasheet (HGX B200)
GH200 480GB:                       97871  4000  989.4 494.7  66.9 1978.9   450  NVIDIA GH200 datasheet (96GB HBM3)
GH200 144G HBM3e:                   144G  4900  989.4 494.7  66.9 1978.9   450  NVIDIA GH200 datasheet (144GB HBM3e)
H200:                       =143155.9375  4800  989.4 494.7  66.9 1978.9   450  NVIDIA H200 datasheet (SXM)
H200 NVL:                         143771  4800  835.5 417.5    60 1670.5   450  NVIDIA H200 datasheet (NVL)
H100 80GB HBM3:                   =81079  3350  989.4 494.7  66.9 1978.9   450  NVIDIA H100 datasheet (SXM)
H100 NVL:                          95830  3900  835.5 417.5    60 1670.5     -  NVIDIA H100 datasheet (NVL)
H100 PCIe:                         81559  2000    756   378    51   1513     -  NVIDIA H100 datasheet (PCIe)
H800:                              81559  3350  989.4 494.7  66.9 1978.9   200  NVIDIA H800 datasheet (SXM)
H20:                               97871  4000    148    74    44    296   450  NVIDIA H20 datasheet
[NVIDIA | 4 | -]
A100-SXM4-80GB:                    81920  2039    312   156  19.5      -   300  NVIDIA A100 datasheet (80GB SXM)
A100-SXM4-40GB:                    40960  1555    312   156  19.5      -   300  NVIDIA A100 datasheet (40GB SXM)
A100 80GB PCIe:                    81920  1935    312   156  19.5      -     -  NVIDIA A100 datasheet (80GB PCIe)
A100-PCIE-40GB:                    40960  1555    312   156  19.5      -     -  NVIDIA A100 datasheet (40GB PCIe)
A800-SXM4-80GB:                    81920  2039    312   156  19.5      -   200  NVIDIA A800 datasheet (80GB SXM)
A40:                               46068   696  149.7  74.8  37.4      -     -  NVIDIA A40 datasheet
A30:                               24576   933    165    82  10.3      -     -  NVIDIA A30 datasheet
A10:                               23028   600    125  62.5  31.2      -     -  NVIDIA A10 datasheet
A10G:                              23028   600     70    35    35      -     -  NVIDIA A10G datasheet
L40S:                              46068   864 362.05   183  91.6    733     -  NVIDIA L40S datasheet
L40:                               46068   864 181.05  90.5  90.5    362     -  NVIDIA L40 datasheet
L4:                                23034   300    121    60  30.3  242.5     -  NVIDIA L4 datasheet
[Tesla | 3 | -]
T4:                                15360   320     65     -   8.1      -     -  NVIDIA T4 datasheet
V100-SXM2-16GB:                    16384   900    125     -  15.7      -   150  NVIDIA V100 datasheet (SXM2)
V100-SXM2-32GB:                    32768   900    125     -  15.7      -   150  NVIDIA V100 datasheet (SXM2)
V100-PCIE-16GB:                    16384   900    112     -    14      -     -  NVIDIA V100 datasheet (PCIe)
V100-PCIE-32GB:                    32768   900    112     -    14      -     -  NVIDIA V100 datasheet (PCIe)
V100S-PCIE-32GB:                   32768  1134    130     -  16.4      -     -  NVIDIA V100 datasheet (V100S)
P100-PCIE-16GB:                    16384   732      -     -     -      -     -  NVIDIA P100 datasheet (no tensor cores)
[NVIDIA RTX PRO 6000 Blackwell | 5 | -]
Workstation Edition:               97887  1792    500   250   125   1000     -  NVIDIA RTX PRO 6000 datasheet
Max-Q Workstation Edition:         97887  1792    440   220   110    880     -  NVIDIA RTX PRO 6000 Max-Q datasheet
Server Edition:                    97887  1597    480   240   120    960     -  NVIDIA RTX PRO 6000 Server datasheet
[NVIDIA RTX | 4 | -]
A6000:                             49140   768  154.8  77.4  38.7      -     -  NVIDIA Ampere GA102 whitepaper
A5000:                             24564   768  111.2  55.6  27.8      -     -  NVIDIA RTX A5000 datasheet
A4500:                             20470   640   94.8  47.4  23.7      -     -  NVIDIA RTX A4500 datasheet
A4000:                             16376   448   76.8  38.4  19.2      -     -  NVIDIA RTX A4000 datasheet
6000 Ada Generation:               49140   960  364.2 182.1  91.1  728.5     -  NVIDIA RTX 6000 Ada datasheet
5000 Ada Generation:               32760   576  261.2 130.6  65.3  522.4     -  NVIDIA RTX 5000 Ada datasheet
4000 Ada Generation:               20475   360  106.8  53.4  26.7  213.6     -  NVIDIA RTX 4000 Ada datasheet
[NVIDIA TITAN | 3 | -]
RTX:                               24576   672  130.5     -  16.3      -     -  NVIDIA TITAN RTX datasheet
[NVIDIA GeForce RTX | 5 | nvidia.com/geforce/laptops/compare (rates depend on the power limit)]
5090 Laptop GPU:                   24463
5080 Laptop GPU:                   16303
5070 Ti Laptop GPU:                12227
5070 Laptop GPU:                    8151
5060 Laptop GPU:                    8151
5050 Laptop GPU:                    8151
[NVIDIA GeForce RTX | 5 | nvidia.com/geforce/graphics-cards/compare (fp32 accumulate)]
5090:                              32607  1792  209.5 104.8 104.8    419
5080:                              16303   960  112.6  56.3  56.3  225.1
5070 Ti:                           16303   896   87.9  43.9  43.9  175.8
5070:                              12227   672   61.7  30.9  30.9  123.5
5060 Ti 16GB:                      16311   448   47.4  23.7  23.7   94.8
5060 Ti 8GB:                        8151   448   47.4  23.7  23.7   94.8
5060:                               8151   448   38.4  19.2  19.2   76.7
5050:                               8151   320   26.3  13.2  13.2   52.7
[NVIDIA GeForce RTX | 4 | nvidia.com/geforce/laptops/compare (rates depend on the power limit)]
4090 Laptop GPU:                   16376
4080 Laptop GPU:                   12282
4070 Laptop GPU:                    8188
4060 Laptop GPU:                    8188
4050 Laptop GPU:                    6141
[NVIDIA GeForce RTX | 4 | nvidia.com/geforce/graphics-cards/compare (fp32 accumulate)]
4090:                              24564  1008  165.2  82.6  82.6  330.3
4090 D:                            24564  1008  147.1  73.5  73.5  294.2
4080 SUPER:                        16376   736  104.4  52.2  52.2  208.9
4080:                              16376   717   97.5  48.7  48.7  194.9
4070 Ti SUPER:                     16376   672   88.2  44.1  44.1  176.4
4070 Ti:                           12282   504   80.2  40.1  40.1  160.4
4070 SUPER:                        12282   504     71  35.5  35.5  141.9
4070:                              12282   504   58.3  29.1  29.1  116.6
4060 Ti 16GB:                      16380   288   44.1  22.1  22.1   88.3
4060 Ti 8GB:                        8188   288   44.1  22.1  22.1   88.3
4060:                               8188   272   30.2  15.1  15.1   60.5
[NVIDIA GeForce RTX | 4 | nvidia.com/geforce/laptops/compare (rates depend on the power limit)]
3080 Ti Laptop GPU:                16384
3080 Laptop GPU 8GB:                8192
3080 Laptop GPU 16GB:              16384
3070 Ti Laptop GPU:                 8192
3070 Laptop GPU:                    8192
3060 Laptop GPU:                    6144
3050 Ti Laptop GPU:                 4096
3050 Laptop GPU 6GB:                6144
3050 Laptop GPU 4GB:                4096
[NVIDIA GeForce RTX | 4 | nvidia.com/geforce/graphics-cards/compare (fp32 accumulate)]
3090 Ti:                           24564  1008     80    40    40
3090:                              24576   936     71  35.6  35.6
3080 Ti:                           12288   912   68.2  34.1  34.1
3080 10GB:                         10240   760   59.5  29.8  29.8
3080 12GB:                         12288   912   61.3  30.6  30.6
3070 Ti:                            8192   608   43.5  21.7  21.7
3070:                               8192   448   40.6  20.3  20.3
3060 Ti:                            8192   448   32.4  16.2  16.2
3060 12GB:                         12288   360   25.5  12.7  12.7
3060 8GB:                           8192   240   25.5  12.7  12.7
3050 8GB:                           8192   224   18.2   9.1   9.1
3050 6GB:                           6144   168   13.5   6.8   6.8
[NVIDIA GeForce RTX | 3 | nvidia.com/geforce/graphics-cards/compare (fp32 accumulate)]
2080 Ti:                           11264   616   53.8     -  13.4
2080 SUPER:                         8192   496   44.6     -  11.2
2080:                               8192   448   40.3     -  10.1
2070 SUPER:                         8192   448   36.2     -   9.1
2070:                               8192   448   29.9     -   7.5
2060 SUPER:                         8192   448   28.7     -   7.2
2060 6GB:                           6144   336   25.8     -   6.5
2060 12GB:                         12288   336   28.7     -   7.2
[AMD Instinct | 5 | -]
MI355X:                             288G  8000 2516.6     - 157.3 5033.2 537.6  AMD Instinct MI355X datasheet
MI350X:                             288G  8000 2306.9     - 144.2 4613.7 537.6  AMD Instinct MI350X datasheet
MI325X:                             256G  6000 1307.4 653.7 163.4 2614.9   448  AMD Instinct MI325X datasheet
MI300X:                             192G  5300 1307.4 653.7 163.4 2614.9   448  AMD Instinct MI300X datasheet
[AMD Instinct | 4 | -]
MI250X:                              64G  1638  191.5     - 47.85      -     -  AMD MI250X datasheet (one of two dies)
MI250:                               64G  1638 181.05     - 45.25      -     -  AMD MI250 datasheet (one of two dies)
MI210:                               64G  1638    181     -  45.3      -     -  AMD Instinct MI210 datasheet
[AMD Radeon RX | 4 | -]
7900 XTX:                            24G   960  122.8     -  61.4      -     -  amd.com: Radeon RX 7900 XTX
7900 XT:                             20G   800    103     -  51.5      -     -  amd.com: Radeon RX 7900 XT
[Apple | - | support.apple.com/specs]
M1:                                 8,16 68.25
M1 Pro:                            16,32   200
M1 Max:                            32,64   400
M1 Ultra:                         64,128   800
M2:                              8,16,24   100
M2 Pro:                            16,32   200
M2 Max:                         32,64,96   400
M2 Ultra:                     64,128,192   800
M3:                              8,16,24   100
M3 Pro:                            18,36   150
M3 Max:                            36,96   300
M3 Max:                        48,64,128   400
M3 Ultra:                     96,256,512   819
M4:                             16,24,32   120
M4 Pro:                         24,48,64   273
M4 Max:                               36   410
M4 Max:                        48,64,128   546
M5:                             16,24,32   153
M5 Pro:                         24,48,64   307
M5 Max:                     36,48,64,128
"""
"""One row a device, below a line of what its rows share: [the beginning of their names | generation of PCIe | source].

The name is the one the driver reports, then memory, GB/s of it, TFLOP/s of fp16, tf32, fp32 and fp8 at the boost clock
(sparse figures halved; GeForce with fp32 accumulation), GB/s of links in one direction, and its own source. A dash and
what is left out: it has none, or its datasheet states none. bf16 is as fast as fp16 since Ampere, and before, with the
third generation of PCIe, there is none; AMD's fp32 is that of its matrix cores.

Memory is the MiB that nvidia-smi reports. With `=`: MiB that PyTorch stated in stored runs (h200, h100-x2). With `G`:
GiB of the label. Of B300 and GB300 no run says whether their 288 GB are GiB: counted in powers of ten. Apple's chips
have GB that processor and GPU share, in several sizes. One name with several memories has a row for each.

Links are half of what datasheets of NVLink and Infinity Fabric count in both directions. Cards on PCIe, alone or in
bridged pairs, have none: what connects them depends on the host."""

_FEW_BITS = {
    "NVIDIA GB300": (5000, 15000), "NVIDIA B300 SXM6 AC": (4500, 13125), "NVIDIA GB200": (5000, 10000),
    "NVIDIA B200": (4500, 9000), "AMD Instinct MI355X": (10066.3, 10066.3), "AMD Instinct MI350X": (9227.5, 9227.5),
}  # fmt: skip
"""Dense TFLOP/s of fp6 and of fp4 in blocks with scales, where the makers name both, as third-party pages repeat them.

NVIDIA's fp6 is as fast as fp8. Its fp4, in PFLOP/s: 1,080 of 72 GB300 (verda.com/blog/gb300-nvl72-architecture), 13.125
of a B300 (glennklockwood.com/garden/processors/B300), 10 of a GB200 and 9 of a B200 (the same site, B200). AMD's are
256 compute units x 16,384 a clock x 2.4 or 2.2 GHz, half of the sparse 20 PFLOP/s of an MI355X and 148 of eight MI350X
(www.svethardware.cz, article 61870)."""

REPORTED_MIB: dict[str, int] = {}
"""What nvidia-smi reports as the memory of a device, by its name."""
_PCIE: dict[str, int] = {}


def pcie_generation(name: str) -> int:
    """The generation of PCIe by which a device of this name is joined to its host, with 16 lanes: 4 of unknown ones."""
    return _PCIE.get(name, 4)


HOST_BYTES_PER_S = 50e9
"""What a GPU on PCIe 5.0 copies to its host's locked memory or from it in a second, while a step runs: 49.9 and 50.9
GB/s, two H200 at once (the trace of offload-22 in results/h200-x2/long-step). Each generation of PCIe before has half
of the next."""


def is_unified(spec: DeviceSpec) -> bool:
    """Whether the GPU shares its memory with the processor: Apple's."""
    return spec.name.startswith("Apple ")


def _metal_bytes(gb: int) -> int:
    """What Metal takes of a Mac's memory by default: two thirds, from 36 GB on three quarters.

    The least in logs of llama.cpp, which print recommendedMaxWorkingSetSize: 10922 of 16384 MiB, 16384 of 24576, and
    98304 of 131072. Later macOS recommends more: 12124 of 16384, and 110100 of 131072.
    """
    return gb * GIB * 2 // 3 if gb < 36 else gb * GIB * 3 // 4


def stated_bytes(memory: str) -> int:
    """Bytes that PyTorch can be expected to state, by the table's memory.

    The driver keeps more of larger cards: 382 MiB of RTX 4060s with 8188, 378 of an RTX 3060 with 12288, 451 of T4s
    with 15360, 471 of L4s with 23034, 643 of an RTX 6000 Ada with 49140, and 880 of A100s with 81920, the most in
    messages and logs of users. 352 MiB and a 128th of the memory are more than each.
    """
    if memory.startswith("="):
        return int(float(memory[1:]) * MIB)
    mib = 1024 * int(memory[:-1]) if memory.endswith("G") else int(memory)
    return (mib - 352 - mib // 128) * MIB


def _specs() -> Iterator[DeviceSpec]:
    begins, generation, shared = "", "", ""
    for line in _DATASHEETS.strip().splitlines():
        if line.startswith("["):
            begins, generation, shared = line.strip("[]").split(" | ")
            continue
        name, _, row = line.partition(":")
        name = f"{begins} {name}".strip()
        memory, *figures = row.split(maxsplit=7)
        own = figures.pop() if len(figures) == 7 else shared
        rate, fp16, tf32, fp32, fp8, link = (
            float(figure) if figure != "-" else None for figure in (*figures, *["-"] * (6 - len(figures)))
        )
        rates = {"bf16": None if generation == "3" else fp16, "fp16": fp16, "tf32": tf32, "fp32": fp32, "fp8": fp8}
        rates |= dict(zip(("fp6", "fp4"), _FEW_BITS.get(name, ()), strict=False))
        spec = DeviceSpec(
            name=name,
            peak_flops_per_s={dtype: teraflops * 1e12 for dtype, teraflops in rates.items() if teraflops},
            peak_bytes_per_s=rate and rate * 1e9,
            link_bytes_per_s=link and link * 1e9,
            source=own,
        )
        if is_unified(spec):
            for gb in map(int, memory.split(",")):
                yield msgspec.structs.replace(spec, name=f"{name} {gb}GB", memory_bytes=_metal_bytes(gb))
            continue
        _PCIE[name] = int(generation)
        if memory.isdigit():
            REPORTED_MIB[name] = int(memory)
        yield msgspec.structs.replace(spec, memory_bytes=stated_bytes(memory))


DATASHEET: dict[str, DeviceSpec] = {spec.name: spec for spec in _specs()}


def find_device_spec(device_name: str) -> DeviceSpec | None:
    """The datasheet of the device of this name, or None.

    Older drivers leave the maker out, and a virtual machine adds VF.
    """
    named = device_name.removesuffix(" VF")
    for name in (named, f"NVIDIA {named}"):
        if spec := DATASHEET.get(name):
            return spec
        sizes = [spec for spec in DATASHEET.values() if spec.name != name == _without_size(spec.name)]
        if sizes:  # of one name with several memories the first, which most have
            found = msgspec.structs.replace(sizes[0], name=name, memory_bytes=None)
            one = not is_unified(found) or len({size.peak_bytes_per_s for size in sizes}) == 1
            return found if one else msgspec.structs.replace(found, peak_bytes_per_s=None)
    return None


_PLAIN: dict[str, str] = dict.fromkeys(("h100", "h100 sxm", "h100 sxm5"), "NVIDIA H100 80GB HBM3")
"""The device that a plain name means, where its variants differ: the one that most have."""
_MOST_NAMES = 8


def device_named(name: str, *, otherwise: str = "") -> DeviceSpec:
    """The device of the datasheets that a name means: the one whose name ends with all of it, as 3090 does that of no
    3090 Ti, or the only one whose words begin so. Raises InputError where it is none of them, or several, as where one
    name has several memories: with those that it could be, or that are spelled alike."""
    wanted = _words(name)
    if plain := _PLAIN.get(" ".join(wanted)):
        return DATASHEET[plain]
    # Each word begins a word of the device's name: h200 is no GH200.
    matching = [
        spec
        for spec in DATASHEET.values()
        if wanted and all(any(word.startswith(begin) for word in _words(spec.name)) for begin in wanted)
    ]
    count = len(wanted)
    matching = [spec for spec in matching if _words(spec.name)[-count:] == wanted] or matching
    matching = [spec for spec in matching if _words(_without_size(spec.name))[-count:] == wanted] or matching
    if len(matching) == 1:
        return matching[0]
    what = "matches several devices" if matching else "is in no datasheet that stepscope has"
    known = [spec.name for spec in matching] or _alike(" ".join(wanted))
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    raise InputError(f"device {name!r} {what}: choose one of {', '.join(known[:_MOST_NAMES])}{more}{otherwise}")


def _without_size(name: str) -> str:
    return re.sub(r" \d+GB$", "", name)


def _words(name: str) -> list[str]:
    """The words of a device's name but for GPU, however it is spelled: `RTX4060-Ti 16 GB` is rtx, 4060, ti, 16gb."""
    apart = re.sub(r"\b(rtx|gtx)(?=\d)", r"\1 ", name.lower().replace("-", " "))
    return [word for word in re.sub(r"\b(\d+) gi?b\b", r"\1gb", apart).split() if word != "gpu"]


def _alike(wanted: str) -> list[str]:
    """Devices whose names, without their makers, are spelled like this; a few of each kind where none is."""
    makers = r"nvidia |geforce |tesla |amd |apple |rtx |gtx "
    short = {re.sub(makers, "", " ".join(_words(name))): name for name in DATASHEET}
    close = difflib.get_close_matches(re.sub(makers, "", wanted), short, n=5, cutoff=0.5)
    return [short[name] for name in close] or ["H100", "A100-SXM4-80GB", "L4", "T4", "RTX 4090", "M4 16GB", "MI300X"]


def lacks(device_name: str, dtype: str) -> bool:
    """Whether the device is known not to multiply matrices of this dtype: Volta and Turing have neither bf16 nor TF32.

    Of an unknown device, and of one whose datasheet states no rates, nothing is known.
    """
    spec = find_device_spec(device_name)
    return spec is not None and bool(spec.peak_flops_per_s) and dtype not in spec.peak_flops_per_s


def overridden_spec(device_name: str, dtype: Dtype, peak_flops_per_s: float) -> DeviceSpec:
    """The spec a user states by `--peak-flops`, on top of the datasheet if there is one."""
    known = find_device_spec(device_name) or DeviceSpec(name="", peak_flops_per_s={}, source="")
    return msgspec.structs.replace(
        known,
        name=device_name,
        peak_flops_per_s={**known.peak_flops_per_s, PRECISIONS[dtype].multiplies: peak_flops_per_s},
        source="stated by --peak-flops",
    )


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The best rate measured on this device for one kind of operation, and the operation that reached it."""

    rate: float
    """FLOP/s for a matrix product, bytes/s (read plus written) for a copy."""
    operation: str
    median_s: float
    samples: int


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ceilings of one device under one build of PyTorch."""

    device_name: str
    torch_version: str
    measured_at: str
    """When the newest of them was measured."""
    matmul: dict[str, Ceiling] = {}
    copy: Ceiling | None = None

    def matmul_for(self, dtype: Dtype) -> Ceiling | None:
        return self.matmul.get(PRECISIONS[dtype].multiplies)


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """A device with its datasheet figures and its measured ceilings."""

    environment: Environment
    spec: DeviceSpec | None
    ceilings: Ceilings
