"""The papers that methods come from.

Receives: nothing.
Gives: one Citation each, for ``clipwise cite`` and reports.
"""

from clipwise.types import Citation

ABADI_2016 = Citation(
    "abadi2016deep",
    "Abadi, Martin and Chu, Andy and Goodfellow, Ian and McMahan, H. Brendan and Mironov, Ilya and Talwar, Kunal "
    "and Zhang, Li",
    "Deep Learning with Differential Privacy",
    "ACM Conference on Computer and Communications Security",
    2016,
)
ANDREW_2021 = Citation(
    "andrew2021differentially",
    "Andrew, Galen and Thakkar, Om and McMahan, H. Brendan and Ramaswamy, Swaroop",
    "Differentially Private Learning with Adaptive Clipping",
    "Advances in Neural Information Processing Systems",
    2021,
)
BU_2023_AUTOMATIC = Citation(
    "bu2023automatic",
    "Bu, Zhiqi and Wang, Yu-Xiang and Zha, Sheng and Karypis, George",
    "Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger",
    "Advances in Neural Information Processing Systems",
    2023,
)
BU_2023_CONVERGENCE = Citation(
    "bu2023convergence",
    "Bu, Zhiqi and Wang, Hua and Dai, Zongyu and Long, Qi",
    "On the Convergence and Calibration of Deep Learning with Differential Privacy",
    "Transactions on Machine Learning Research",
    2023,
)
MCMAHAN_2018 = Citation(
    "mcmahan2018general",
    "McMahan, H. Brendan and Andrew, Galen and Erlingsson, Ulfar and Chien, Steve and Mironov, Ilya and Papernot, "
    "Nicolas and Kairouz, Peter",
    "A General Approach to Adding Differential Privacy to Iterative Training Procedures",
    "NeurIPS Workshop on Privacy Preserving Machine Learning",
    2018,
)
XIA_2023 = Citation(
    "xia2023differentially",
    "Xia, Tianyu and Shen, Shuheng and Yao, Su and Fu, Xinyi and Xu, Ke and Xu, Xiaolong and Fu, Xing",
    "Differentially Private Learning with Per-Sample Adaptive Clipping",
    "AAAI Conference on Artificial Intelligence",
    2023,
)
YANG_2022 = Citation(
    "yang2022normalized",
    "Yang, Xiaodong and Zhang, Huishuai and Chen, Wei and Liu, Tie-Yan",
    "Normalized/Clipped SGD with Perturbation for Differentially Private Non-Convex Optimization",
    "arXiv 2206.13033",
    2022,
)
